#!lua flags=allow-oom
-- uses: core counters give_back
-- Releases trajectories of a worker. ARGV: session, '1' when the attempt does not count, '2' when they rest too,
-- ids.
-- Returns the number of released trajectories and of processed ids; the caller sends the other ids again.
local released, at = 0, 3
while at <= #ARGV and members_read < MOST_MEMBERS_READ do
  if call('SREM', held_key(ARGV[1]), ARGV[at]) == 1 then
    give_back(ARGV[at], ARGV[2] ~= '0', ARGV[2] == '2')
    released = released + 1
  end
  at = at + 1
end
flush_counts()
return {released, at - 3}
