#!lua flags=allow-oom
-- Applies the policy versions of first tokens that are saved later to the age of their groups. ARGV: session, number of
-- items, then per item: id, policy version. Returns (status, saved tokens) per item.
-- docs/architecture.md: The staleness bound
local steps, reply = {}, {}
for at = 3, #ARGV, 2 do
  steps[at] = train_step_of(ARGV[at + 1])
end
for at = 3, #ARGV, 2 do
  local id, step = ARGV[at], steps[at]
  local v = call('HMGET', trajectory_key(id), 'session', 'state', 'tokens', 'step')
  local held = v[1] == ARGV[1] and v[2] == S.leased
  if held and (not v[4] or step < tonumber(v[4])) then
    call('HSET', trajectory_key(id), 'step', step)
    lower_step(load_group(group_of(id)), step, id)
  end
  reply[#reply + 1] = held and SAVED or LOST
  reply[#reply + 1] = held and tonumber(v[3]) or 0
end
return reply
