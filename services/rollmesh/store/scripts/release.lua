#!lua flags=allow-oom
-- A worker lets trajectories go. ARGV: session, '1' when the attempt does not count, ids. Returns how many it held.
local released = 0
for at = 3, #ARGV do
  if call('SREM', held_key(ARGV[1]), ARGV[at]) == 1 then
    give_back(ARGV[at], ARGV[2] == '1')
    released = released + 1
  end
end
flush_counts()
return released
