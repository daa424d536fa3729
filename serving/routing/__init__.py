"""Which data rank of which worker gets a request."""
