"""Other ways to share attention than the product's, by plain collectives or the code of a package."""
