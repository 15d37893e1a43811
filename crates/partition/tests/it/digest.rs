//! Digests: another one where anything that matters differs, and the same on every machine.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;

use polarshard_partition::{
    Layout, Matrix, Param, Params, Placement, Plan, Policy, Route, Span, Wire, WorldSize,
    strategies,
};
use proptest::prelude::*;

/// Two matrices in one parameter, or one.
fn params(name: &str, shape: [usize; 2], wire: Wire, matrices: usize) -> Params {
    let rows = shape[0] / matrices;
    let matrix = |index| Matrix {
        span: Span::of_len(index * rows * shape[1], rows * shape[1]),
        rows,
        cols: shape[1],
        cost: 7,
    };
    let param = Param {
        name: name.into(),
        shape: shape.into_iter().collect(),
        wire,
        matrices: (0..matrices).map(matrix).collect(),
    };
    Params::new(vec![param]).unwrap()
}

fn plan(
    params: &Params,
    world: usize,
    placement: Placement,
    size: usize,
    route: Route,
    policy: Policy,
) -> Plan {
    let layout = Layout::new(
        params,
        WorldSize::new(world).unwrap(),
        placement,
        NonZeroUsize::new(size).unwrap(),
    )
    .unwrap();
    Plan::new(params, layout, route, policy)
}

#[test]
fn digests_differ_where_anything_that_matters_does() {
    let base = params("w", [4, 6], Wire::BF16, 1);
    let (placement, route, policy) = (
        Placement::Striped,
        Route::ReduceScatter,
        Policy::AssignOwner,
    );
    let models = [
        base.clone(),
        params("v", [4, 6], Wire::BF16, 1),
        params("w", [6, 4], Wire::BF16, 1),
        params("w", [4, 6], Wire::F16, 1),
        params("w", [4, 6], Wire::BF16, 2),
    ];
    let mut plans: Vec<_> = models
        .iter()
        .map(|params| plan(params, 3, placement, 50, route, policy))
        .collect();
    plans.push(plan(&base, 4, placement, 50, route, policy));
    plans.push(plan(&base, 3, placement, 51, route, policy));
    plans.extend(
        [Placement::Flat, Placement::Whole]
            .map(|placement| plan(&base, 3, placement, 50, route, policy)),
    );
    let layouts: BTreeSet<_> = plans.iter().map(|plan| plan.layout().digest()).collect();
    assert_eq!(layouts.len(), plans.len());
    let routes = [
        Route::AllReduce,
        Route::BucketAllReduce,
        Route::ReduceToOwner,
    ];
    plans.extend(routes.map(|route| plan(&base, 3, placement, 50, route, policy)));
    plans.extend(
        [Policy::CopyToOwners, Policy::ExchangeUpdate]
            .map(|policy| plan(&base, 3, placement, 50, route, policy)),
    );
    let distinct: BTreeSet<_> = plans.iter().map(Plan::digest).collect();
    assert_eq!(distinct.len(), plans.len());
}

/// Ranks of different builds compare them, so they may not change by
/// accident. Computed apart, by FNV-1a over what the docs say is in them.
#[test]
fn a_digest_is_stable() {
    let plan = plan(
        &params("w", [4, 6], Wire::BF16, 2),
        3,
        Placement::Striped,
        50,
        Route::ReduceScatter,
        Policy::AssignOwner,
    );
    assert_eq!(plan.params().digest().to_string(), "fb60272c527dcf35");
    assert_eq!(plan.layout().digest().to_string(), "bddd34d2fc1ee1ff");
    assert_eq!(plan.digest().to_string(), "87ea19f4bc634782");
}

proptest! {
    #[test]
    fn the_same_input_gives_the_same_plan((params, layout) in strategies::layout(), route in strategies::route(), policy in strategies::policy()) {
        let again = Layout::new(&params, layout.world(), layout.placement(), layout.bucket_size()).unwrap();
        prop_assert_eq!(&layout, &again);
        let (a, b) = (Plan::new(&params, layout, route, policy), Plan::new(&params, again, route, policy));
        prop_assert_eq!(a.digest(), b.digest());
        prop_assert_eq!(a.buckets(), b.buckets());
    }
}
