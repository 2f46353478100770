"""`kvasir-operator status`: one service on one screen, read from the cluster by anybody who may view its namespace."""
