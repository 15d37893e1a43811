//! What is fixed about the buckets: their wires, and where each gradient goes.

use polarshard_partition::{ParamId, Piece, Plan, Space, Span, Wire};

/// What is fixed about a bucket.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) space: Space,
    pub(super) wire: Wire,
    /// The power of two by which an f16 wire is kept from overflowing.
    pub(super) prescale: f64,
    /// Elements of the buffer.
    pub(super) len: usize,
    pub(super) parameters: usize,
    /// Elements of the buffer that no parameter writes.
    pub(super) padding: Vec<Span>,
}

/// Where a parameter's gradient goes: its bucket, and its runs in there.
#[derive(Debug)]
pub(super) struct Home {
    pub(super) bucket: usize,
    pub(super) pieces: Vec<Piece>,
}

/// All buckets, in their order.
pub(super) fn lanes(plan: &Plan, gradient_wire: Option<Wire>) -> Vec<Lane> {
    let layout = plan.layout();
    let lane = |(bucket, id)| {
        let bucket: &polarshard_partition::BucketPlan = bucket;
        let place = layout.bucket(id);
        let space = layout.space(place.space);
        let wire = gradient_wire.unwrap_or(space.wire);
        Lane {
            space,
            wire,
            prescale: prescale(wire, layout.world().get()),
            len: bucket.len,
            parameters: place.params.len(),
            padding: gaps(bucket.len, &bucket.pieces),
        }
    };
    plan.buckets()
        .iter()
        .zip(layout.bucket_ids())
        .map(lane)
        .collect()
}

/// By parameter; an empty one has none.
pub(super) fn homes(plan: &Plan) -> Vec<Option<Home>> {
    let home = |param: ParamId| {
        let bucket = plan.layout().bucket_of(param)?.index();
        let pieces = plan.buckets()[bucket].pieces_of(param).copied().collect();
        Some(Home { bucket, pieces })
    };
    plan.params().iter().map(|(param, _)| home(param)).collect()
}

/// The largest power of two up to 1/W on an f16 wire, where a sum of W values could overflow; 1 elsewhere.
fn prescale(wire: Wire, world: usize) -> f64 {
    match wire {
        Wire::F16 => 1.0 / world.next_power_of_two() as f64,
        _ => 1.0,
    }
}

/// What ascending pieces leave free of a buffer.
fn gaps(len: usize, pieces: &[Piece]) -> Vec<Span> {
    let mut gaps = Vec::new();
    let mut end = 0;
    for piece in pieces {
        if piece.at > end {
            gaps.push(Span::new(end, piece.at));
        }
        end = piece.at + piece.span.len();
    }
    if len > end {
        gaps.push(Span::new(end, len));
    }
    gaps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_f16_sum_over_ranks_cannot_overflow_where_one_rank_did_not() {
        for world in 1..=64 {
            let factor = prescale(Wire::F16, world);
            assert!(
                factor * world as f64 <= 1.0 && 2.0 * factor * world as f64 > 1.0,
                "{world}"
            );
            assert_eq!(factor.log2().fract(), 0.0);
            assert_eq!(prescale(Wire::BF16, world), 1.0);
        }
    }
}
