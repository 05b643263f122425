"""A test and the program that it tests, in two processes of a box, of which the program's is not trusted.

Begin with separate_test.py. It knows the box only by what box_program.py gives it.
"""
