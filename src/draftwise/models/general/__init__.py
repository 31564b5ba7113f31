"""Any causal model whose attention goes through Transformers' attention interface, on our cache and kernels."""
