#!lua flags=allow-oom
-- Drops the saved tokens of held, unfinished trajectories, which begin again. ARGV: session, ids. Returns how many.
local restarted = 0
for at = 2, #ARGV do
  local id = ARGV[at]
  local v = call('HMGET', trajectory_key(id), 'session', 'state', 'tokens', 'links', 'attempts')
  if v[1] == ARGV[1] and v[2] == 'leased' and tonumber(v[3]) > 0 then
    local fields = {}
    for _, field in ipairs(call('HKEYS', trajectory_key(id))) do
      if string.match(field, '^c%d+$') then fields[#fields + 1] = field end
    end
    call('HDEL', trajectory_key(id), 'links', 'step', 'snapshot', 'has_snapshot', 'version', 'generator')
    in_slices(fields, function(...) call('HDEL', trajectory_key(id), ...) end)
    local keys = {}
    payload_keys(id, v[4], keys)
    unlink(keys)
    -- No number of tokens: whatever the new beginning writes, the next lease finds no progress.
    call('HSET', trajectory_key(id), 'tokens', 0, 'mark', '-')
    recompute_step(load_group(group_of(id)), id)
    count('restarted_tokens_total', tonumber(v[3]))
    restarted = restarted + 1
  end
end
count('restarts_total', restarted)
flush_counts()
return restarted
