"""How it is computed: engines around modules."""
