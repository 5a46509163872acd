"""What tests share: ranks as processes, small models, small datasets."""
