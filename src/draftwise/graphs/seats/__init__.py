"""Steps that stay on the device: requests that decode have seats there, and the host reads late what came of them."""
