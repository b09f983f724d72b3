-- The prompt history has one record per prompt: "groups members solved rewards tokens longest step", written when the last
-- member of a group ends, or the group is evicted before. Members are the scored ones; rewards are whole millionths.
-- Sums, maxima and whole numbers give the same record for every order of the groups. Only groups with a `prompt` field
-- have a history.
local MOST_PROMPTS, MOST_OUTCOMES = 1048576, 65536
local LARGEST_REWARD = 1000000
local NO_FACTS, FACTS = '0 0 0 -', '^(%S+) (%S+) (%S+) (%S+)$'

-- Adds a scored member to the facts of its group: "solved rewards longest first", the last for the tokens of member 0.
local function add_member_facts(group, id, reward, tokens, is_solved)
  if not group.prompt then return end
  local solved, rewards, longest, first = string.match(group.facts or NO_FACTS, FACTS)
  local counted = math.max(-LARGEST_REWARD, math.min(LARGEST_REWARD, reward))
  group.facts = table.concat({
    integer(tonumber(solved) + (is_solved and 1 or 0)),
    integer(tonumber(rewards) + math.floor(counted * 1000000 + 0.5)),
    integer(math.max(tonumber(longest), tokens)),
    string.match(id, '%.0$') and integer(tokens) or first,
  }, ' ')
end

-- Forgets the rewards of a group, which are about to be added again. A member stays solved whatever its reward becomes.
local function forget_rewards(group)
  local solved = group.facts and string.match(group.facts, FACTS)
  group.low, group.high, group.facts = nil, nil, solved and solved .. ' 0 0 -'
end

-- `history_changes` numbers the changes of records; the newest ones are in a stream, for leaders that follow them.
local MOST_CHANGES = 16384
local function note_change(name)
  local number = call('HINCRBY', K.meta, 'history_changes', 1)
  call('XADD', K.changes, 'MAXLEN', '~', MOST_CHANGES, integer(number) .. '-0', 'name', name)
end

-- Adds one group to a record. A new record beyond MOST_PROMPTS is left out.
local function add_to_record(name, members, solved, rewards, tokens, longest, step)
  local there = call('HGET', K.history, name)
  if not there and call('HLEN', K.history) >= MOST_PROMPTS then return count('history_full_total', 1) end
  local sums = {}
  for word in string.gmatch(there or '0 0 0 0 0 0 0', '%S+') do sums[#sums + 1] = tonumber(word) end
  local added = {1, tonumber(members), tonumber(solved), tonumber(rewards), tonumber(tokens)}
  for at, by in ipairs(added) do sums[at] = integer(sums[at] + by) end
  sums[6] = integer(math.max(sums[6], tonumber(longest)))
  sums[7] = integer(math.max(sums[7], tonumber(step)))
  call('HSET', K.history, name, table.concat(sums, ' '))
  note_change(name)
end

-- Adds one group, "members solved rewards tokens longest step prompt", to the record of its prompt. With a domain, the
-- step is "step@domain", and the record "domain:<domain>" gets the same.
local function add_to_history(outcome)
  local members, solved, rewards, tokens, longest, step, domain, prompt =
    string.match(outcome, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%d+)@?(%S*) (.*)$')
  add_to_record(prompt, members, solved, rewards, tokens, longest, step)
  if domain ~= '' then add_to_record('domain:' .. domain, members, solved, rewards, tokens, longest, step) end
end

-- Notes how well lengths were predicted: "expected mean first rest", the expectation at the admission and the mean length
-- of the scored members, the length of member 0 and the mean of the others; '-' for an unknown one.
local MOST_PREDICTIONS = 256
local function note_prediction(group, first)
  if group.scored == 0 then return end
  if group.scored == 1 then first = '-' end
  local rest = first == '-' and '-' or string.format('%.2f', (group.tokens - tonumber(first)) / (group.scored - 1))
  local mean = string.format('%.2f', group.tokens / group.scored)
  call('LPUSH', K.predictions, table.concat({group.expected or '-', mean, first, rest}, ' '))
  call('LTRIM', K.predictions, 0, MOST_PREDICTIONS - 1)
end

-- Records a group that has just ended; one that is evicted instead counts as drawn, without members. The next batch file
-- copies its outcome; beyond MOST_OUTCOMES, no file has it.
local function note_outcome(group, is_evicted)
  if not group.prompt then return end
  local sums = '0 0 0 0 0'
  if not is_evicted then
    local solved, rewards, longest, first = string.match(group.facts or NO_FACTS, FACTS)
    note_prediction(group, first)
    sums = table.concat({integer(group.scored), solved, rewards, integer(group.tokens), longest}, ' ')
  end
  local step = call('HGET', K.meta, 'trained_step')
  if group.domain then step = step .. '@' .. group.domain end
  local outcome = table.concat({sums, step, group.prompt}, ' ')
  add_to_history(outcome)
  if call('HLEN', K.outcomes) >= MOST_OUTCOMES then return count('outcomes_full_total', 1) end
  -- A group that begins again after it was ready, or in a restored Redis, ends twice: the second time, its outcome is not
  -- that of a new draw.
  local name, number = group.id, call('HLEN', K.outcomes)
  while (group.ended and name == group.id) or call('HEXISTS', K.outcomes, name) == 1 do
    name, number = group.id .. '~' .. number, number + 1
  end
  call('HSET', K.outcomes, name, outcome)
end
