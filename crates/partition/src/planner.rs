//! All plans, compared by what a step of each costs.

use std::num::NonZeroUsize;

use crate::{
    Bytes, Error, Layout, Params, Placement, Plan, Policy, Rank, Route, Terms, Traffic, WorldSize,
};

/// What the machine can do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// Bytes that a rank sends in a second.
    pub link_bytes_per_second: f64,
    /// FLOPs of Newton-Schulz that a rank does in a second.
    pub flops_per_second: f64,
    /// Seconds that a call takes beside those of its bytes; 0 leaves calls out of account.
    pub call_seconds: f64,
    /// Bytes that a rank may hold; `None` is any number.
    pub memory_limit: Option<Bytes>,
}

/// One combination, and what a step of it costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Where parameters lie.
    pub placement: Placement,
    /// How gradients are reduced.
    pub route: Route,
    /// How split matrices get whole.
    pub policy: Policy,
    /// Payload bytes sent in a step, summed over ranks.
    pub bytes: u64,
    /// FLOPs of Newton-Schulz on the slowest rank.
    pub flops: u64,
    /// Calls in a step of the rank with most.
    pub calls: u64,
    /// What the rank with most holds.
    pub memory: Bytes,
    /// `bytes / W / link_bytes_per_second + flops / flops_per_second + calls · call_seconds`:
    /// without overlap, so good for comparing candidates only.
    pub seconds: f64,
}

/// Every combination of placement, route and policy that keeps within the memory limit: the
/// fastest first; of equally fast ones, that with fewest bytes; then in the order of
/// [`Placement::ALL`], [`Route::ALL`] and [`Policy::ALL`].
///
/// # Errors
/// [`Error::Cost`] if a speed is not a positive number or a call's time a negative one, [`Error::MemoryLimit`] if nothing is within
/// the limit, [`Error::TooLarge`] as [`Layout::new`].
pub fn plan_best(
    params: &Params,
    world: WorldSize,
    bucket_size: NonZeroUsize,
    terms: &Terms,
    costs: &Costs,
) -> Result<Vec<Candidate>, Error> {
    check(
        "a link's speed in bytes per second",
        costs.link_bytes_per_second,
    )?;
    check("a rank's speed in FLOPs per second", costs.flops_per_second)?;
    if costs.call_seconds != 0.0 {
        check("a call's time in seconds", costs.call_seconds)?;
    }
    let mut candidates = Vec::new();
    for placement in Placement::ALL {
        let layout = Layout::new(params, world, placement, bucket_size)?;
        for route in Route::ALL {
            for policy in Policy::ALL {
                let plan = Plan::new(params, layout.clone(), route, policy);
                candidates.push(candidate(&plan, terms, costs));
            }
        }
    }
    let limit = costs.memory_limit.unwrap_or(Bytes(u64::MAX));
    let least = candidates
        .iter()
        .map(|candidate| candidate.memory)
        .min()
        .unwrap_or_default();
    candidates.retain(|candidate| candidate.memory <= limit);
    if candidates.is_empty() {
        return Err(Error::MemoryLimit {
            limit: limit.0,
            least: least.0,
        });
    }
    // Stable, so that ties keep the order above.
    candidates.sort_by(|a, b| a.seconds.total_cmp(&b.seconds).then(a.bytes.cmp(&b.bytes)));
    Ok(candidates)
}

fn check(what: &'static str, value: f64) -> Result<(), Error> {
    if value.is_finite() && value > 0.0 {
        Ok(())
    } else {
        Err(Error::Cost {
            what,
            value: value.to_string(),
        })
    }
}

fn candidate(plan: &Plan, terms: &Terms, costs: &Costs) -> Candidate {
    let world = plan.layout().world();
    let mut traffic = Traffic::default();
    let common: Vec<_> = plan
        .reductions(terms)
        .into_iter()
        .chain(plan.gathers())
        .collect();
    common.iter().for_each(|call| traffic.add(world, call));
    let mut most_sends = 0;
    for rank in world.ranks() {
        let sends = plan.sends(rank, terms);
        most_sends = sends.len().max(most_sends);
        sends.iter().for_each(|call| traffic.add(world, call));
    }
    let calls = (common.len() + most_sends) as u64;
    let bytes = traffic.total().bytes;
    let most = |count: &dyn Fn(Rank) -> u64| world.ranks().map(count).max().unwrap_or(0);
    let flops = most(&|rank| plan.flops(rank));
    let memory = Bytes(most(&|rank| plan.memory(rank, terms).total().0));
    let seconds = bytes as f64 / world.get() as f64 / costs.link_bytes_per_second
        + flops as f64 / costs.flops_per_second
        + calls as f64 * costs.call_seconds;
    Candidate {
        placement: plan.layout().placement(),
        route: plan.route(),
        policy: plan.policy(),
        bytes,
        flops,
        calls,
        memory,
        seconds,
    }
}
