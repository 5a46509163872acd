"""Everything that touches a process group: groups, exchanges with deadlines, agreement, and who was lost when one
fails."""
