#!lua flags=allow-oom
-- Releases trajectories of a worker. ARGV: session, '1' when the attempt does not count, '2' when they rest too,
-- ids.
-- Returns the number of released trajectories.
local released = 0
for at = 3, #ARGV do
  if call('SREM', held_key(ARGV[1]), ARGV[at]) == 1 then
    give_back(ARGV[at], ARGV[2] ~= '0', ARGV[2] == '2')
    released = released + 1
  end
end
flush_counts()
return released
