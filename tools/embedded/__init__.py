"""Parts of the recipe in tools/make_embedded_model.py."""
