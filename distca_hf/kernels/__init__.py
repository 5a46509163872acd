"""Varlen causal attention on one device: what each kernel can do, and adapters that give them one shape."""
