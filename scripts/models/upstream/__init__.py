"""Transformers' own tests with distca: the part that pytest loads, outcomes, and the section of the page."""
