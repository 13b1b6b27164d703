// Plans random decode batches on the host and follows each plan as the kernels would: every request must see each of
// its KV tokens once, rotated by its own offset, and nothing else; and blocks of different speeds must finish together.
// Usage: plan_decode FIRST_SEED NUM_SEEDS
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <utility>

#include "check.h"
#include "plan_decode.cuh"

using namespace lazy;
using Token = std::pair<int, int>;  // slot, rotation

struct Batch {
  int bs, max_segments;
  std::vector<int> kv_indptr{0}, kv_indices, num_segments, segment_ends, segment_offsets, segment_ids;
  std::vector<std::multiset<Token>> expected;
};

PlanArgs arguments(const std::vector<int>& kv_indptr, const std::vector<int>& num_segments,
                   const std::vector<int>& ends, const std::vector<int>& offsets, const std::vector<int>& ids) {
  PlanArgs args{kv_indptr.data(), num_segments.data(), ends.data(), offsets.data(), ids.data()};
  args.bs = num_segments.size();
  args.max_segments = args.stride_ends = args.stride_offsets = args.stride_ids = ends.size() / num_segments.size();
  return args;
}

Batch random_batch(std::mt19937& rng, auto&& between) {
  Batch batch{between(1, 40), between(1, 40)};
  int next_slot = 1;
  std::vector<std::vector<int>> chunks(between(1, between(0, 1) ? 12 : 300));
  for (auto& chunk : chunks) {
    chunk.resize(between(1, between(0, 1) ? 5 : 500));
    for (int& slot : chunk) slot = next_slot++;
  }
  // Equal to another in length and in its first and last slot, but not between them.
  for (int like = 0, count = chunks.size(); like < count; like += between(1, 3)) {
    auto chunk = chunks[like];
    for (int i = 1; i + 1 < int(chunk.size()); ++i) chunk[i] = next_slot++;
    chunks.push_back(chunk);
  }
  std::shuffle(chunks.begin(), chunks.end(), rng);
  const int id_step = between(0, 1) ? 1 : between(1, 1 << 20), nobody = between(2, 9);
  const int width = batch.max_segments, stale = 123456;
  const int together = between(-4, 4);  // requests with the same chunks, if positive; else chunks are drawn
  batch.segment_ends.resize(batch.bs * width, stale);
  batch.segment_offsets.resize(batch.bs * width, stale);
  batch.segment_ids.resize(batch.bs * width, stale);
  for (int b = 0; b < batch.bs; ++b) {
    const int num_segments = between(0, 3) ? between(0, width) : 0;
    std::vector<int> row;
    std::vector<Token> tokens;
    for (int s = 0; s < num_segments; ++s) {
      const int which = together > 0 ? (b / together * width + s) % chunks.size() : between(0, chunks.size() - 1);
      const auto& chunk = chunks[which];
      const int offset = between(0, 1000);
      for (int slot : chunk) row.push_back(slot), tokens.push_back({slot, offset});
      batch.segment_ends[b * width + s] = row.size();
      batch.segment_offsets[b * width + s] = offset;
      batch.segment_ids[b * width + s] = which % nobody != 1 ? which * id_step : -1;
    }
    for (int text = between(0, 4) ? between(1, 200) : 0; text; --text) {
      row.push_back(next_slot), tokens.push_back({next_slot++, 0});
    }
    if (between(0, 5) == 0) {  // a padding row of a graph's batch: one KV token, stale segments
      row = {between(0, 1) ? chunks[between(0, chunks.size() - 1)].back() : between(1, next_slot)};
      tokens = {{row[0], num_segments ? batch.segment_offsets[b * width] : 0}};
    }
    batch.kv_indices.insert(batch.kv_indices.end(), row.begin(), row.end());
    batch.kv_indptr.push_back(batch.kv_indices.size());
    batch.num_segments.push_back(num_segments);
    batch.expected.emplace_back(tokens.begin(), tokens.end());
  }
  batch.kv_indices.resize(batch.kv_indices.size() + 600, 77);
  return batch;
}

int cuts(const Plan& plan) {  // through groups
  int cuts = 0;
  for (int i = 0; i < plan.header->num_groups; ++i) cuts += plan.groups[plan.shared_groups[i]].pieces - 1;
  return cuts;
}

// The number of groups, and of their users: one group for every id, except -1, that at least two segments have which
// end before their row does, if sharing it saves enough.
std::pair<int, int> expected_groups(const Batch& batch, int min_saved_tokens) {
  std::map<int, std::pair<int, int>> uses;  // of each id: how many, tokens
  for (int b = 0; b < batch.bs; ++b) {
    const int length = batch.kv_indptr[b + 1] - batch.kv_indptr[b];
    for (int s = 0, begin = 0; s < batch.num_segments[b]; ++s) {
      const int at = b * batch.max_segments + s, end = batch.segment_ends[at], id = batch.segment_ids[at];
      if (id >= 0 && end < length) uses[id].first += 1, uses[id].second = end - begin;
      begin = end;
    }
  }
  int groups = 0, all_users = 0;
  for (const auto& [id, use] : uses) {
    const auto [users, tokens] = use;
    if (users > 1 && (users - 1) * tokens >= min_saved_tokens) ++groups, all_users += users;
  }
  return {groups, all_users};
}

void test(int seed) {
  std::mt19937 rng(seed);
  auto between = [&](int low, int high) { return low + int(rng() % unsigned(high - low + 1)); };
  auto one_of = [&](auto... values) { return std::vector<int>{values...}[between(0, sizeof...(values) - 1)]; };
  Batch batch = random_batch(rng, between);
  const int head_dim = one_of(64, 128, 256), num_kv_heads = one_of(1, 2, 3, 4, 5, 8, 12, 32);
  const int group_size = std::min(one_of(1, 4, 7, 8, 16, 32), Geometry::max_rows(head_dim));
  PlanArgs args =
      arguments(batch.kv_indptr, batch.num_segments, batch.segment_ends, batch.segment_offsets, batch.segment_ids);
  args.span = one_of(0, 0, 0, 1, 3, 64), args.min_saved_tokens = one_of(1, 64, 1 << 30);
  auto layout = PlanLayout::make(args.bs, args.max_segments, group_size * num_kv_heads, num_kv_heads, head_dim,
                                 between(1, one_of(6, 132)));
  const auto [num_groups, num_users] = expected_groups(batch, args.min_saved_tokens);
  // Sometimes there is exactly enough room for all uses, sometimes too little for the uses or for the ids.
  const int full = between(0, 4);
  if (full < 3) {
    const int room = full < 2 ? num_users : between(0, num_users), less = layout.max_shared_users - room;
    layout.table_size = full == 2 && between(0, 1) ? 32 : layout.table_size;
    layout.max_shared_users -= less, layout.max_shared_partials -= less, layout.max_partials -= less;
  }
  std::vector<int> workspace(layout.num_words, -1234567);
  const Plan plan(workspace.data(), layout);
  run(plan_kernel, args, plan, layout);

  struct Partial {
    int request;
    std::multiset<Token> seen;
  };
  std::map<int, Partial> partials;
  auto follow = [&](const Item& item) {
    CHECK(item.num_users > 0 && item.num_users <= layout.users_per_item && item.num_tiles > 0, "a bad item");
    int begin = item.begin, end = item.end, offset = item.offset, run = item.run;
    for (int tile = 0; tile < item.num_tiles; ++tile) {
      if (tile && (begin += layout.tile[plan.header->is_wide]) >= end) {
        begin = plan.runs[run].begin, end = plan.runs[run].end, offset = plan.runs[run].offset, ++run;
      }
      CHECK(begin < end, "an empty tile");
      for (int i = 0; i < item.num_users; ++i) {
        const User user = plan.users[item.user + i];
        CHECK(item.partial + i < layout.max_partials, "no room for partial result %d", item.partial + i);
        CHECK(!offset || !user.offset, "two rotations");
        Partial& partial = partials.try_emplace(item.partial + i, Partial{user.request}).first->second;
        CHECK(partial.request == user.request, "one partial result for two requests");
        for (int at = begin; at < std::min(begin + layout.tile[plan.header->is_wide], end); ++at) {
          partial.seen.insert({batch.kv_indices[at], offset + user.offset});
        }
      }
    }
  };
  const int found = plan.header->num_groups, expected = num_groups;
  CHECK(full == 2 ? found <= expected : found == expected, "%d groups, not %d", found, expected);
  CHECK(plan.header->num_shared_partials <= layout.max_shared_partials, "%d shared results for %d places",
        plan.header->num_shared_partials, layout.max_shared_partials);
  CHECK(plan.header->num_items <= layout.max_items, "too many items");
  CHECK(plan.header->num_parts <= layout.max_partials, "too many partial results");
  CHECK(plan.header->num_tasks <= layout.max_tasks, "too many tasks");
  const int head_groups = layout.head_groups[plan.header->is_wide];
  const TaskQueue queue{plan.header->num_tasks * head_groups, plan.header->front_blocks, layout.num_blocks};
  CHECK(queue.front_blocks >= 0 && queue.front_blocks <= queue.num_blocks, "%d blocks at the front",
        queue.front_blocks);
  const int num_spans = plan.header->num_tasks - plan.header->large_tasks, takers = layout.num_blocks / head_groups;
  CHECK(num_spans <= layout.max_spans, "%d spans", num_spans);
  CHECK(args.span || plan.header->large_tiles || cuts(plan) < std::max(takers, 1), "groups are cut %d times",
        cuts(plan));
  std::vector<int> pairs, working;
  for (int block = 0; block < queue.num_blocks; ++block) {
    CHECK(queue.first(block) >= 0, "block %d starts before the first pair", block);
    if (queue.first(block) < queue.num_pairs) pairs.push_back(queue.first(block)), working.push_back(block);
  }
  for (unsigned long long taken = 0; !working.empty();) {  // blocks return in any order
    const int at = between(0, int(working.size()) - 1), block = working[at];
    const int pair = queue.next(block, taken);
    taken += queue.count(block);
    if (pair < queue.num_pairs) pairs.push_back(pair);
    else working.erase(working.begin() + at);
  }
  std::sort(pairs.begin(), pairs.end());
  CHECK(int(pairs.size()) == queue.num_pairs, "%zu of %d pairs are taken", pairs.size(), queue.num_pairs);
  for (int i = 0; i < queue.num_pairs; ++i) CHECK(pairs[i] == i, "pair %d is taken twice or never", i);
  std::set<int> done;
  for (int u = 0; u < plan.header->num_tasks; ++u) {
    const Task& task = plan.tasks[u];
    if (task.item.num_tiles) follow(task.item);
    CHECK(task.item.num_tiles || !task.count, "items after the last one");
    for (int i = 0; i < task.count; ++i) {
      CHECK(done.insert(task.others + i).second, "an item twice");
      follow(plan.items[task.others + i]);
    }
  }

  std::set<int> merged;
  for (int b = 0; b < batch.bs; ++b) {
    std::multiset<Token> seen;
    for (int i = 0; i < plan.parts[b].count; ++i) {
      const int partial = plan.part_ids[plan.parts[b].first + i];
      const auto found = partials.find(partial);
      CHECK(found != partials.end() && found->second.request == b, "request %d merges another request's result", b);
      CHECK(merged.insert(partial).second, "partial result %d merged twice", partial);
      seen.insert(found->second.seen.begin(), found->second.seen.end());
    }
    CHECK(seen == batch.expected[b], "request %d sees %zu tokens, not its %zu", b, seen.size(),
          batch.expected[b].size());
  }
  CHECK(merged.size() == partials.size(), "%zu partial results, %zu merged", partials.size(), merged.size());
}

// The time lost to imbalance, relative to the time that all blocks together need for the work, when the speeds of
// blocks differ by up to a sixteenth either way.
// Requests have five chunks of 2048 tokens and a text of 64: groups of eight share their chunks, or all draw from a
// pool.
double lost(int seed, int bs, int pool) {
  std::mt19937 rng(seed);
  constexpr int CHUNKS = 5, CHUNK = 2048, TEXT = 64, BLOCKS = 132;
  std::vector<int> kv_indptr{0}, num_segments(bs, CHUNKS), ends, offsets(bs * CHUNKS), ids;
  for (int b = 0; b < bs; ++b) {
    std::vector<int> drawn(pool ? pool : CHUNKS);
    for (int i = 0; i < int(drawn.size()); ++i) drawn[i] = pool ? i : b / 8 * CHUNKS + i;
    if (pool) std::shuffle(drawn.begin(), drawn.end(), rng);
    for (int s = 0; s < CHUNKS; ++s) {
      ids.push_back(drawn[s]);
      ends.push_back((s + 1) * CHUNK);
    }
    kv_indptr.push_back(kv_indptr.back() + CHUNKS * CHUNK + TEXT);
  }
  PlanArgs args = arguments(kv_indptr, num_segments, ends, offsets, ids);
  args.min_saved_tokens = 64;
  const auto layout = PlanLayout::make(bs, CHUNKS, 32, 8, 128, BLOCKS);
  std::vector<int> workspace(layout.num_words);
  const Plan plan(workspace.data(), layout);
  run(plan_kernel, args, plan, layout);

  const int head_groups = layout.head_groups[plan.header->is_wide];
  CHECK(plan.header->num_tasks - plan.header->large_tasks <= layout.max_spans, "too many spans");
  CHECK(plan.header->large_tiles || cuts(plan) < BLOCKS / head_groups, "groups are cut %d times", cuts(plan));
  const TaskQueue queue{plan.header->num_tasks * head_groups, plan.header->front_blocks, BLOCKS};
  auto cost = [&](int pair) {
    const Task& task = plan.tasks[pair / head_groups];
    int tiles = task.item.num_tiles ? task.item.num_tiles + fixed_cost(task.item.num_users) : 0;
    for (int i = task.others; i < task.others + task.count; ++i) {
      tiles += plan.items[i].num_tiles + fixed_cost(plan.items[i].num_users);
    }
    return tiles;
  };
  double work = 0, speeds = 0, end = 0;
  for (int pair = 0; pair < queue.num_pairs; ++pair) work += cost(pair);
  std::vector<double> speed(BLOCKS);
  std::set<std::pair<double, int>> free;  // blocks by the time at which they return
  auto take = [&](int block, int pair, double now) {
    if (pair < queue.num_pairs) free.insert({now + cost(pair) / speed[block], block});
    end = std::max(end, now);
  };
  for (int block = 0; block < BLOCKS; ++block) {
    speeds += speed[block] = 1 + (int(rng() % 1001) - 500) / 8000.;
    take(block, queue.first(block), 0);
  }
  for (unsigned long long taken = 0; !free.empty();) {
    const auto [now, block] = *free.begin();
    free.erase(free.begin());
    take(block, queue.next(block, taken), now);
    taken += queue.count(block);
  }
  return end / (work / speeds) - 1;
}

void test_ends(int seed) {
  for (const auto [bs, pool] : {std::pair{128, 0}, {64, 100}, {128, 128}, {128, 1024}}) {
    const double part = lost(seed, bs, pool);
    CHECK(part < 0.05, "%d requests, pool of %d: %.3f of the time is lost", bs, pool, part);
  }
}

// The room for partial results of cut groups suffices for the largest possible number of cuts, with little to spare: a
// long chunk with as many users as fit into an item, and one with twice as many.
void test_room_for_cuts(int seed) {
  constexpr int TAKERS = 8, FITTING = 8, USERS = 3 * FITTING, CHUNK = 1 << 20;
  std::vector<int> kv_indptr{0}, num_segments(USERS, 1), ends(USERS, CHUNK), offsets(USERS), ids(USERS, 1);
  for (int b = 0; b < USERS; ++b) kv_indptr.push_back((b + 1) * (CHUNK + 1));
  for (int b = 0; b < FITTING; ++b) ids[b] = 0;
  PlanArgs args = arguments(kv_indptr, num_segments, ends, offsets, ids);
  args.min_saved_tokens = 1;
  for (args.span = 0; args.span < 2; ++args.span) {
    const auto layout = PlanLayout::make(args.bs, 1, 32, 8, 128, 2 * TAKERS);
    std::vector<int> workspace(layout.num_words, -1234567);
    const Plan plan(workspace.data(), layout);
    run(plan_kernel, args, plan, layout);
    const int cut = plan.header->num_shared_partials - USERS, room = layout.max_shared_partials - USERS;
    CHECK(layout.takers(true) == TAKERS && layout.users_per_item == FITTING && plan.header->large_tiles,
          "another geometry");
    CHECK(cut <= room && (!args.span || 4 * cut > 3 * room), "%d results of cuts for %d places", cut, room);
  }
}

// The sizes that `decode_workspace` documents: more rows must not mean proportionally more room for shared chunks.
void test_workspace_is_bounded(int seed) {
  for (const auto [rows, megabytes] : {std::pair{256, 104}, std::pair{4097, 157}}) {
    const auto bytes = 4 * PlanLayout::make(rows, 256, 32, 8, 128, 132).num_words;
    CHECK(std::llabs(bytes - megabytes * 1'000'000LL) < 500'000, "%d rows take %lld bytes", rows, (long long)bytes);
  }
}

int main(int, char** argv) {
  const int first = std::atoi(argv[1]), count = std::atoi(argv[2]);
  for (int seed = first; seed < first + count; ++seed) test(seed);
  test_ends(first);
  test_room_for_cuts(first);
  test_workspace_is_bounded(first);
}
