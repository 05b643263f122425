"""Container images as single files shared by all nodes of a site: pull and build."""
