-- While Redis recovers, a trainer whose session was opened in the lost part is the newest one; a token that is
-- remembered and not current was fenced.
local function adopt_trainer(token)
  if call('HGET', K.meta, 'trainer') == token then return end
  if not recovering() or call('ZSCORE', K.trainers, token) then
    fail('SESSION_LOST', 'a newer trainer session is open')
  end
  call('ZADD', K.trainers, now(), token)
  call('HSET', K.meta, 'trainer', token)
end
