"""Models of Transformers: what is checked, counted and watched of them."""
