// Native core of topo-opt: graph algorithms on plain arrays. Meanings are documented in sim/__init__.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <set>
#include <stdexcept>
#include <vector>

namespace nb = nanobind;

namespace {

// The same numbers as in sim/__init__.py.
enum Kind : int { kPointwise = 0, kReduction = 1, kContraction = 2, kAttention = 3, kUpdate = 4, kScan = 5, kFixed = 6 };
enum Alignment : int { kSame = 0, kPermuted = 1, kOther = 2, kPaired = 3, kLeft = 4, kRight = 5, kRow = 6 };
enum Few : int { kMany = 0, kFew = 1, kVector = 2 };
enum Rule : int { kPrologue = 1, kStatistic = 2, kProducts = 4, kRotation = 8, kAppend = 16, kTransposed = 32 };

// Accumulators of one kernel: each takes registers for a whole tile.
constexpr int kMaxProducts = 2, kMaxSmallProducts = 4;
// How far ahead to look for the node in which all readers of a value meet.
constexpr size_t kMaxRegion = 64;
// Element-wise ops between a reduction and the product that it scales.
constexpr int kMaxSteps = 16;
// Fewer scalar ops than one math function: computing them again is cheaper than the load they replace.
constexpr int64_t kTrivialCost = 8;
// Scalar ops that take a machine as long as a launch.
constexpr int64_t kLaunchOps = int64_t{1} << 26;

struct Node {
  int kind;
  int64_t rows, cols, height;
  int few, order, cost, inputs;
  int64_t input_bytes;
  bool held;
};

struct Edge {
  int source, target, alignment;
  int64_t bytes;
};

struct Cluster {
  int kind;
  int64_t rows, cols, height;
  int few;          // how few rows a contraction has
  int order;        // row order of a reduction, number of the shape of a contraction
  int first, last;  // smallest and largest node index
  int leaves;       // distinct values read from memory, an upper bound
  int products;     // contractions
};

// All edges from one cluster into another, together.
struct Reads {
  int count = 0;
  bool all_same = true, permuted = true, near = true, rows = true;
  bool left = true, right = true, operand = false;
  bool only_user = true;
  int64_t bytes = 0;
};

class Clustering {
 public:
  Clustering(std::vector<Node> nodes, std::vector<Edge> edges, int rules, int max_inputs, int64_t recompute)
      : nodes_(std::move(nodes)), edges_(std::move(edges)), rules_(rules), max_inputs_(max_inputs), recompute_(recompute) {
    const int n = static_cast<int>(nodes_.size());
    parent_.resize(n);
    std::iota(parent_.begin(), parent_.end(), 0);
    in_.resize(n);
    out_.resize(n);
    for (int i = 0; i < n; ++i) {
      const Node &v = nodes_[i];
      clusters_.push_back({v.kind, v.rows, v.cols, v.height, v.few, v.order, i, i, v.inputs, v.kind == kContraction});
    }
    for (int e = 0; e < static_cast<int>(edges_.size()); ++e) {
      if (edges_[e].source >= edges_[e].target) throw std::invalid_argument("edges must go forward in node order");
      in_[edges_[e].target].push_back(e);
      out_[edges_[e].source].push_back(e);
    }
    visited_.assign(n, 0);
    side_.assign(n, kSame);
    members_.resize(n);
    for (int i = 0; i < n; ++i) members_[i] = {i};
  }

  std::vector<int> run() {
    const int n = static_cast<int>(parent_.size());
    for (int node = 0; node < n; ++node) {
      std::vector<int> waiting = {node};
      while (!waiting.empty()) {
        const int reader = waiting.back();
        waiting.pop_back();
        // Heaviest edge first: the value whose round trip through memory costs most.
        std::vector<int> order = in_[reader];
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return edges_[a].bytes > edges_[b].bytes; });
        for (int e : order) {
          const std::vector<int> joined = members_[find(edges_[e].source)];
          // What feeds a new part of a contraction may join it as well; elsewhere every reader has had its turn.
          if (try_merge(find(edges_[e].source), find(reader)) && clusters_[find(reader)].kind == kContraction)
            waiting.insert(waiting.end(), joined.rbegin(), joined.rend());
        }
      }
    }
    std::vector<int> label(n);
    for (int i = 0; i < n; ++i) label[i] = find(i);
    return label;
  }

 private:
  int find(int x) {
    while (parent_[x] != x) x = parent_[x] = parent_[parent_[x]];
    return x;
  }

  bool allows(Rule rule) const { return rules_ & rule; }

  // How an edge enters a cluster: what feeds a node of a prologue enters through the operand that the node computes.
  int entry(int e) const {
    const Edge &edge = edges_[e];
    return side_[edge.target] != kSame ? side_[edge.target] : edge.alignment;
  }

  Reads reads(int a, int b) {
    const Cluster &p = clusters_[a], &c = clusters_[b];
    const int row = kRow + (p.kind == kReduction ? p.order : c.order);
    Reads r;
    for (int m : members_[a]) {
      if (nodes_[m].held) r.only_user = false;
      for (int e : out_[m]) {
        const int to = find(edges_[e].target);
        if (to == a) continue;
        if (to != b) {
          r.only_user = false;
          continue;
        }
        const int way = entry(e);
        const bool one_to_one = way == kSame || way == kPermuted;
        r.all_same &= way == kSame;
        r.rows &= way == kSame || way == row || way == kPaired;
        r.permuted &= one_to_one;
        r.near &= one_to_one || way == kPaired;
        r.left &= way == kLeft;
        r.right &= way == kRight;
        r.operand |= way == kLeft || way == kRight;
        r.bytes = std::max(r.bytes, edges_[e].bytes);
        ++r.count;
      }
    }
    return r;
  }

  bool try_merge(int a, int b) {
    if (a == b) return false;
    const Cluster &p = clusters_[a], &c = clusters_[b];
    const Reads r = reads(a, b);
    if (r.count == 0 || p.leaves + c.leaves > max_inputs_) return false;
    const bool kept_apart = is_anchor(p.kind) ? belongs_to_reader(b) : p.kind == kPointwise && belongs_to_product(b);
    if (!r.only_user && kept_apart && !converges(a)) return false;
    if (!compatible(a, b, r) || creates_cycle(a, b)) return false;
    merge(a, b, r);
    return true;
  }

  // Whether the consumer can keep what the producer computes in registers, and gains by it.
  bool compatible(int a, int b, const Reads &r) {
    const Cluster &p = clusters_[a], &c = clusters_[b];
    if (p.kind == kFixed || c.kind == kFixed || p.kind == kUpdate) return false;
    // What every element of a scan passes through comes after it.
    if (p.kind == kScan) return c.kind == kPointwise && r.permuted && c.rows == p.rows;
    switch (c.kind) {
      case kScan:
        return p.kind == kPointwise && r.only_user && (r.all_same || is_cheap(a, c.rows));
      case kContraction:
        return joins_product(a, b, r);
      case kUpdate:
        if (p.kind == kPointwise) return r.only_user && r.all_same;
        return p.kind == kContraction && allows(kAppend) && r.only_user && r.permuted && p.rows == c.rows;
      case kPointwise:
      case kReduction:
        return joins_loops(a, b, r);
      default:
        return false;
    }
  }

  bool joins_loops(int a, int b, const Reads &r) {
    const Cluster &p = clusters_[a], &c = clusters_[b];
    const int64_t full = c.rows * c.cols;
    if (p.kind == kPointwise) {
      if (c.kind == kPointwise && r.all_same && p.rows == c.rows) return true;
      if (c.kind == kReduction && r.all_same && (p.rows == full || p.rows == c.rows)) return true;
      // A rotation computes its operand a second time, at the partner.
      if (c.kind == kPointwise && r.near && p.rows == c.rows && 2 * cost(a) <= recompute_ && converges(a)) return true;
      // Recomputing a cheap producer where it is read costs less than a trip through memory.
      return r.only_user && is_cheap(a, full);
    }
    if (p.kind == kReduction) {
      if (c.kind == kPointwise && c.rows == p.rows * p.cols && r.near && allows(kTransposed) && converges(a)) return true;
      if (c.kind == kPointwise) return (r.all_same && c.rows == p.rows) || (r.rows && c.rows == p.rows * p.cols);
      return c.kind == kReduction && r.rows && c.rows == p.rows && c.cols == p.cols && c.order == p.order;
    }
    // A contraction or attention takes pointwise consumers as its epilogue.
    const bool rotates = p.kind == kContraction && allows(kRotation);
    return c.kind == kPointwise && (r.permuted || (rotates && r.near)) && c.rows == p.rows;
  }

  bool joins_product(int a, int b, const Reads &r) {
    const Cluster &p = clusters_[a], &c = clusters_[b];
    if (!r.only_user) return false;
    // These wait for their weights, so that work on the other operand is free.
    const bool small = c.few != kMany;
    switch (p.kind) {
      case kPointwise:
        if (!allows(kPrologue) || cost(a) > recompute_) return false;
        // Every column of programs computes the left operand again, every row of programs the right one.
        if (r.left) return small;
        if (r.right) return small || bytes_read(a) < r.bytes;
        if (r.operand) return false;
        return (r.permuted && p.rows == c.rows) || is_cheap(a, c.rows);
      case kReduction:
        if (!allows(kStatistic) || !small || p.rows != c.height || p.cols != c.cols) return false;
        return r.left ? c.few == kVector && cost(a) <= recompute_ : !r.operand;
      case kContraction:
        return allows(kProducts) && p.order == c.order && p.rows == c.rows && r.permuted &&
               p.products + c.products <= (small ? kMaxSmallProducts : kMaxProducts);
      default:
        return false;
    }
  }

  static bool is_anchor(int kind) { return kind == kContraction || kind == kAttention; }

  // The producer's result goes to memory anyway: element-wise ops with one reader are better off with that, which can
  // read the producer's result instead of theirs.
  bool belongs_to_reader(int b) {
    if (clusters_[b].kind != kPointwise) return false;
    int reader = -1;
    bool fuses = true;
    for (int m : members_[b]) {
      if (nodes_[m].held) return false;
      for (int e : out_[m]) {
        const int to = find(edges_[e].target);
        if (to == b) continue;
        if (reader >= 0 && to != reader) return false;
        reader = to;
        const Cluster &c = clusters_[to];
        const int way = entry(e);
        const bool prologue = c.kind == kContraction && way == kLeft && allows(kPrologue) && cost(b) <= recompute_ &&
                              nodes_[edges_[e].target].few != kMany;
        fuses &= prologue || (way == kSame && (c.kind == kPointwise || c.kind == kReduction));
      }
    }
    return reader >= 0 && fuses;
  }

  // Element-wise ops that a product of few rows is going to read, as its operand or in a statistic of its rows: together with
  // a producer that others read as well they would be stored.
  bool belongs_to_product(int b) {
    if (clusters_[b].kind != kPointwise) return false;
    bool found = false;
    for (int m : members_[b]) {
      if (nodes_[m].held) return false;
      for (int e : out_[m]) {
        if (find(edges_[e].target) == b) continue;
        const Edge &last = edges_[last_of_chain(e)];
        const Node &reader = nodes_[last.target];
        const bool prologue = reader.kind == kContraction && last.alignment == kLeft && allows(kPrologue) && reader.few != kMany;
        if (!prologue && !(reader.kind == kReduction && is_statistic(last.target))) return false;
        found = true;
      }
    }
    return found;
  }

  // The last edge of a chain of element-wise ops with one reader each.
  int last_of_chain(int e) const {
    for (int steps = 0; steps < kMaxSteps; ++steps) {
      const int node = edges_[e].target;
      if (nodes_[node].kind != kPointwise || nodes_[node].held || out_[node].size() != 1) break;
      e = out_[node][0];
    }
    return e;
  }

  // Whether a reduction of rows is read, through element-wise ops on its result, with the product of those rows.
  bool is_statistic(int node) const {
    const Node &reduction = nodes_[node];
    if (!allows(kStatistic)) return false;
    for (int steps = 0; steps < kMaxSteps; ++steps) {
      if (out_[node].size() != 1 || nodes_[node].held) return false;
      node = edges_[out_[node][0]].target;
      if (nodes_[node].kind != kPointwise) return false;
      if (nodes_[node].rows == reduction.rows) continue;
      for (int e : in_[node]) {
        const Node &product = nodes_[edges_[e].source];
        if (product.kind == kContraction && product.height == reduction.rows && product.cols == reduction.cols && product.few != kMany)
          return true;
      }
      return false;
    }
    return false;
  }

  // Whether all readers of a cluster meet in one node, with nothing but its element-wise epilogue in between: then its
  // result need not exist in memory.
  bool converges(int a) {
    const Cluster &whole = clusters_[a];
    const int64_t rows = whole.kind == kReduction ? whole.rows * whole.cols : whole.rows;
    std::set<int> pending;
    auto follow = [&](int node, int from) {
      if (nodes_[node].held) return false;
      for (int e : out_[node]) {
        const int to = edges_[e].target;
        if (find(to) == from) continue;
        pending.insert(to);
      }
      return true;
    };
    for (int m : members_[a])
      if (!follow(m, a)) return false;
    std::set<int> region(members_[a].begin(), members_[a].end());
    while (pending.size() > 1) {
      const int node = *pending.begin();
      pending.erase(pending.begin());
      if (nodes_[node].kind != kPointwise || nodes_[node].rows != rows || region.size() > kMaxRegion) return false;
      for (int e : in_[node]) {
        const int way = edges_[e].alignment;
        const bool element_wise = way == kSame || way == kPermuted || (way == kPaired && allows(kRotation));
        if (region.count(edges_[e].source) && !element_wise) return false;
      }
      if (!follow(node, -1)) return false;
      region.insert(node);
    }
    return pending.size() == 1;
  }

  // Whether a cluster may be computed again by each of the `elements` that read it.
  bool is_cheap(int a, int64_t elements) {
    const int64_t each = cost(a), times = std::max<int64_t>(1, elements / std::max<int64_t>(1, clusters_[a].rows));
    if (each < kTrivialCost || each * times <= recompute_) return true;
    return each <= recompute_ && each * elements <= kLaunchOps;
  }

  int64_t cost(int a) {
    int64_t total = 0;
    for (int m : members_[a]) total += nodes_[m].cost;
    return total;
  }

  // What a cluster reads from memory.
  int64_t bytes_read(int a) {
    int64_t total = 0;
    for (int m : members_[a]) {
      total += nodes_[m].input_bytes;
      for (int e : in_[m])
        if (find(edges_[e].source) != a) total += edges_[e].bytes;
    }
    return total;
  }

  // Merging is illegal when a path leaves the producer and comes back into the consumer through a third cluster.
  bool creates_cycle(int a, int b) {
    ++stamp_;
    const int limit = clusters_[b].last;
    std::vector<int> stack;
    auto push_successors = [&](int cluster, bool skip_b) {
      for (int m : members_[cluster])
        for (int e : out_[m]) {
          const int to = find(edges_[e].target);
          if (to == cluster || (skip_b && to == b) || visited_[to] == stamp_ || clusters_[to].first > limit) continue;
          visited_[to] = stamp_;
          stack.push_back(to);
        }
    };
    push_successors(a, true);
    while (!stack.empty()) {
      const int top = stack.back();
      stack.pop_back();
      if (top == b) return true;
      if (top == a) continue;
      push_successors(top, false);
    }
    return false;
  }

  void merge(int a, int b, const Reads &r) {
    const Cluster p = clusters_[a], c = clusters_[b];
    // The shape of the kernel is that of its contraction, attention or reduction.
    const bool producer_leads = c.kind == kPointwise ? p.kind != kPointwise : is_anchor(p.kind) && c.kind == kUpdate;
    Cluster whole = producer_leads ? p : c;
    whole.first = std::min(p.first, c.first);
    whole.last = std::max(p.last, c.last);
    whole.leaves = p.leaves + c.leaves;
    whole.products = p.products + c.products;
    if (c.kind == kContraction && (r.left || r.right))
      for (int m : members_[a]) side_[m] = r.left ? kLeft : kRight;
    if (members_[a].size() < members_[b].size()) std::swap(a, b);
    parent_[b] = a;
    clusters_[a] = whole;
    members_[a].insert(members_[a].end(), members_[b].begin(), members_[b].end());
    members_[b].clear();
  }

  std::vector<Node> nodes_;
  std::vector<Edge> edges_;
  int rules_, max_inputs_;
  int64_t recompute_;
  std::vector<Cluster> clusters_;
  std::vector<int> parent_, visited_, side_;
  std::vector<std::vector<int>> in_, out_, members_;
  int stamp_ = 0;
};

std::vector<int> cluster(const std::vector<std::array<int64_t, 10>> &nodes, const std::vector<std::array<int64_t, 4>> &edges,
                         int rules, int max_inputs, int64_t recompute) {
  std::vector<Node> all_nodes;
  for (const auto &v : nodes)
    all_nodes.push_back({static_cast<int>(v[0]), v[1], v[2], v[3], static_cast<int>(v[4]), static_cast<int>(v[5]), static_cast<int>(v[6]),
                         static_cast<int>(v[7]), v[8], v[9] != 0});
  std::vector<Edge> all_edges;
  const int64_t count = static_cast<int64_t>(nodes.size());
  for (const auto &e : edges) {
    if (e[0] < 0 || e[1] >= count) throw std::invalid_argument("edge end out of range");
    all_edges.push_back({static_cast<int>(e[0]), static_cast<int>(e[1]), static_cast<int>(e[2]), e[3]});
  }
  return Clustering(std::move(all_nodes), std::move(all_edges), rules, max_inputs, recompute).run();
}

}  // namespace

NB_MODULE(_sim, m) {
  m.doc() = "Native graph algorithms of topo-opt.";
  m.def("cluster", &cluster, nb::arg("nodes"), nb::arg("edges"), nb::arg("rules"), nb::arg("max_inputs"), nb::arg("recompute"),
        nb::call_guard<nb::gil_scoped_release>());
}
