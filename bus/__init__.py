"""What services say to each other and how it travels: messages, subjects, codec and the two buses."""
