#!lua flags=allow-oom
-- A worker lets trajectories go. ARGV: session, '1' when the attempt does not count, ids.
-- Returns how many of them it held, and how many ids were looked at: the others wait for another call.
local released, at = 0, 3
while at <= #ARGV and members_read < MOST_MEMBERS_READ do
  if call('SREM', held_key(ARGV[1]), ARGV[at]) == 1 then
    give_back(ARGV[at], ARGV[2] == '1')
    released = released + 1
  end
  at = at + 1
end
flush_counts()
return {released, at - 3}
