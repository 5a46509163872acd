"""Attention servers: ranks without tokens that compute attention for those that train. Training never imports this
without them."""
