#!lua flags=allow-oom
-- Continues the reset of a large group that begins again. ARGV: group, members of this call. Returns 1 while another
-- call is needed.
local more = continue_reset(ARGV[1], tonumber(ARGV[2]))
flush_counts()
return more
