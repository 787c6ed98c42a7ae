"""Scripts that show that something can be built; nothing of the product reads them."""
