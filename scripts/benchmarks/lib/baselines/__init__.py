"""Other ways to share attention than the product's: whole documents, Ulysses, context parallelism, and the ideal; and
the code of a package."""
