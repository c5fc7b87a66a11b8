"""The transaction coordinator on the node: requests to its rules, markers to partitions, questions from leaders."""
