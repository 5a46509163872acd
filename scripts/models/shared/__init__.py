"""Sections of a page, which the programs of this folder share."""
