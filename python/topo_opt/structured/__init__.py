"""Reading structured IR: functions as plain graphs, and how every op's result indices become operand indices."""
