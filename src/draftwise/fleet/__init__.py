"""Several engines behind one port: routing of requests, and recovery when an engine is gone."""
