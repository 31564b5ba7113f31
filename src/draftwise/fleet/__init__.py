"""Several engines behind one port: who gets a request, and what becomes of it when one of them is gone."""
