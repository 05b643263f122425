"""Container images as one file that all nodes of a site use: pull and build."""
