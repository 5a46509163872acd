"""Everything that touches a process group: groups, exchanges with deadlines, agreement, and the roll call that names
lost ranks."""
