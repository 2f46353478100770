"""Answers that follow a grammar: what clients ask for, made into grammars, and what follows one token by token."""
