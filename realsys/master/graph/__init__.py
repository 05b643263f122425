"""One step of the dataflow graph: which call runs when, on which samples, on which workers.

``function_executor.py`` walks the graph, ``model_function_call.py`` runs one call, ``buffer.py`` holds
which sample has which keys.
"""
