"""Reading: where a topic's records are, and the pages, batches and values made of them."""
