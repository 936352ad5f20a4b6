"""Reading: sources of records, and the pages, batches and values made from them."""
