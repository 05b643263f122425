"""Data sets by their names on a Hugging Face hub: `task.path=hf:OWNER/NAME[@REVISION][/FILES]`.

``hub_settings.with_local_data`` turns such settings into files under the site's file root;
``hub_names.py`` decides which files a name means, ``hub_data.py`` keeps what was fetched, and
``hub_client.py`` is the process that asks the hub.
"""
