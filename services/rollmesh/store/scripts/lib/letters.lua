-- Dead letters keep their payload, so their number and their bytes are bounded: the oldest are deleted first.
local MOST_LETTERS = 1000

-- Bytes of ids and logprobs, list entries and keys, as in the memory estimate of the scheduler, and of the prompt.
local function letter_bytes(id, tokens)
  return 8 * tonumber(tokens) + 90 * call('LLEN', letter_segments_key(id)) + call('STRLEN', letter_prompt_key(id)) + 1500
end

-- A sixteenth of the server's memory.
local function most_letter_bytes()
  local limit = tonumber(string.match(call('INFO', 'memory'), '\nmaxmemory:(%d+)'))
  return limit > 0 and limit / 16 or 268435456
end

local function count_letter_bytes(id, now_bytes)
  local before = tonumber(call('HGET', letter_key(id), 'bytes') or '0')
  return call('HINCRBY', K.meta, 'letter_bytes', now_bytes - before)
end

local function forget_letter(id)
  count_letter_bytes(id, 0)
  for name in string.gmatch(call('HGET', letter_key(id), 'links') or '', '%S+') do
    call('UNLINK', chunk_key(id .. ':' .. name))
  end
  call('UNLINK', letter_key(id), letter_segments_key(id), letter_prompt_key(id))
  return call('ZREM', K.letters, id)
end

-- The newest letter stays, regardless of its size.
local function forget_surplus_letters(newest)
  local letters = call('ZCARD', K.letters)
  local bytes, most_bytes = tonumber(call('HGET', K.meta, 'letter_bytes')), most_letter_bytes()
  for _, id in ipairs(call('ZRANGE', K.letters, 0, 3)) do
    if id == newest or (letters <= MOST_LETTERS and bytes <= most_bytes) then return end
    forget_letter(id)
    letters, bytes = letters - 1, tonumber(call('HGET', K.meta, 'letter_bytes'))
    count('letters_forgotten_total', 1)
  end
end
