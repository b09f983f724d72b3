-- Makes a trainer current whose session Redis has lost, since no newer session is recorded. A recorded token that is not
-- current was fenced.
local function adopt_trainer(token)
  require_run()
  local current = call('HGET', K.meta, 'trainer')
  if current == token then return end
  if call('ZSCORE', K.trainers, token) or (current and not recovering()) then
    fail('SESSION_LOST', 'a newer trainer session is open')
  end
  call('ZADD', K.trainers, now(), token)
  call('HSET', K.meta, 'trainer', token)
end
