#!lua flags=allow-oom
-- Turns held trajectories into dead letters. ARGV: session, then (id, reason) each. Returns their number.
local buried = 0
for at = 2, #ARGV, 2 do
  if load_group(group_of(ARGV[at])) and call('SREM', held_key(ARGV[1]), ARGV[at]) == 1 then
    count(call('HGET', trajectory_key(ARGV[at]), 'state'), -1)
    bury(ARGV[at], ARGV[at + 1])
    buried = buried + 1
  end
end
flush_groups()
flush_counts()
return buried
