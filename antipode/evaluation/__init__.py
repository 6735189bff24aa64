"""Protocols: a frozen backbone and labelled data in, a number out."""
