"""Drives a backend to where its errors show, and writes down numbers; judges nothing."""
