"""`jitmoe bench`: the layer and its peers measured by one protocol, one row a point."""
