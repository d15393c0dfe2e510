"""Selection policies over several models of an app (paper 002, section 5): who is asked, how outputs become one, what feedback teaches. Pure."""
