"""Modules around one operation each. They hold parameters only; state goes in and comes out."""
