"""Protocols: a backbone and labelled data in, a number out."""
