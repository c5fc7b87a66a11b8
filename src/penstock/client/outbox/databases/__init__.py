"""The relay's side of the database: what is to be published, who may publish it, and what is done with it."""
