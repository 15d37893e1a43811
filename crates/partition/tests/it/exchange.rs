//! What ranks swap: simulated with buffers of tagged elements.

use std::collections::{BTreeMap, BTreeSet};

use polarshard_partition::{
    ExchangeKind, MatrixId, ParamId, Piece, Plan, Policy, Rank, RankExchange, Route, UpdateGroup,
    strategies,
};
use proptest::prelude::*;

use crate::oracle::{Oracle, matrix_at};

type Element = (ParamId, usize);

/// What every rank receives: each element with the rank that it comes from. Checks the parcels.
fn deliver(plan: &Plan, kind: ExchangeKind) -> Vec<BTreeMap<Element, Rank>> {
    let ranks: Vec<RankExchange> = plan
        .layout()
        .world()
        .ranks()
        .map(|rank| plan.exchange(kind, rank))
        .collect();
    let mut received = vec![BTreeMap::new(); ranks.len()];
    for (index, exchange) in ranks.iter().enumerate() {
        let rank = Rank(index);
        let mut end = 0;
        for parcel in exchange.sends.iter().chain(&exchange.receives) {
            assert_eq!(
                parcel.span.start, end,
                "parcels tile the buffer: sends, then receives"
            );
            assert_ne!(parcel.peer, rank, "nobody sends to itself");
            for piece in &parcel.pieces {
                assert_eq!(piece.at, end, "pieces tile the parcel");
                assert!(!piece.span.is_empty());
                end += piece.span.len();
            }
            assert_eq!(parcel.span.end, end);
            assert!(
                parcel
                    .pieces
                    .is_sorted_by_key(|piece| (piece.param, piece.span))
            );
        }
        assert_eq!(exchange.len, end);
        for parcels in [&exchange.sends, &exchange.receives] {
            assert!(
                parcels.is_sorted_by(|a, b| a.peer < b.peer),
                "one parcel a peer, ascending"
            );
        }
        for parcel in &exchange.receives {
            let contents = |pieces: &[Piece]| {
                pieces
                    .iter()
                    .map(|piece| (piece.param, piece.span))
                    .collect::<Vec<_>>()
            };
            let sent: Vec<_> = ranks[parcel.peer.0]
                .sends
                .iter()
                .filter(|sent| sent.peer == rank)
                .collect();
            assert_eq!(sent.len(), 1, "what is received is sent");
            assert_eq!(
                contents(&sent[0].pieces),
                contents(&parcel.pieces),
                "both sides agree"
            );
            for piece in &parcel.pieces {
                for elem in piece.span.start..piece.span.end {
                    assert_eq!(
                        received[index].insert((piece.param, elem), parcel.peer),
                        None,
                        "received once"
                    );
                }
            }
        }
    }
    let parcels = |pick: fn(&RankExchange) -> usize| ranks.iter().map(pick).sum::<usize>();
    assert_eq!(
        parcels(|exchange| exchange.sends.len()),
        parcels(|exchange| exchange.receives.len()),
        "what is sent is received"
    );
    received
}

/// The ranks that orthogonalize a matrix, by the words of the design; any one under `AssignOwner`.
fn computing(plan: &Plan, oracle: &Oracle, id: MatrixId) -> BTreeSet<Rank> {
    let (param, matrix) = plan.params().matrix(id);
    match plan.policy() {
        Policy::CopyToOwners => oracle.param_owners(param),
        Policy::ExchangeUpdate => oracle.owners(param, matrix.span),
        Policy::AssignOwner => plan.compute_owner(id).into_iter().collect(),
    }
}

proptest! {
    #[test]
    fn jobs_are_those_of_the_policy(plan in strategies::plan()) {
        let oracle = Oracle::new(plan.params(), plan.layout());
        for (id, ..) in plan.params().matrices() {
            let with_job: BTreeSet<_> = plan.layout().world().ranks().filter(|rank| plan.jobs(*rank).contains(&id)).collect();
            prop_assert_eq!(plan.compute_owner(id).is_some(), plan.policy() == Policy::AssignOwner);
            prop_assert!(!with_job.is_empty());
            prop_assert_eq!(with_job, computing(&plan, &oracle, id));
        }
        for rank in plan.layout().world().ranks() {
            prop_assert!(plan.jobs(rank).is_sorted_by(|a, b| a < b));
        }
    }

    #[test]
    fn gradients_go_to_every_other_owner(plan in strategies::plan()) {
        let oracle = Oracle::new(plan.params(), plan.layout());
        let mut expected = vec![BTreeMap::new(); plan.layout().world().get()];
        if plan.policy() == Policy::CopyToOwners && plan.route() == Route::ReduceScatter {
            for (id, param) in plan.params().iter().filter(|(id, _)| oracle.split(plan.params(), *id)) {
                for rank in oracle.param_owners(id) {
                    let others = (0..param.elems()).map(|elem| ((id, elem), oracle.owner(id, elem)));
                    expected[rank.0].extend(others.filter(|(_, owner)| *owner != rank));
                }
            }
        }
        prop_assert_eq!(deliver(&plan, ExchangeKind::Gradients), expected);
    }

    #[test]
    fn updates_go_where_the_matrix_is_computed_and_results_return(plan in strategies::plan()) {
        let oracle = Oracle::new(plan.params(), plan.layout());
        let mut updates = vec![BTreeMap::new(); plan.layout().world().get()];
        let mut results = updates.clone();
        for (id, param) in plan.params().iter().filter(|(_, param)| param.group() == UpdateGroup::Muon) {
            for elem in 0..param.elems() {
                let owner = oracle.owner(id, elem);
                for rank in computing(&plan, &oracle, matrix_at(plan.params(), id, elem)) {
                    if rank != owner && plan.policy() != Policy::CopyToOwners {
                        updates[rank.0].insert((id, elem), owner);
                    }
                    if rank != owner && plan.policy() == Policy::AssignOwner {
                        results[owner.0].insert((id, elem), rank);
                    }
                }
            }
        }
        prop_assert_eq!(deliver(&plan, ExchangeKind::Updates), updates);
        prop_assert_eq!(deliver(&plan, ExchangeKind::Results), results);
    }

    #[test]
    fn a_piece_lies_in_one_matrix(plan in strategies::plan()) {
        for kind in [ExchangeKind::Updates, ExchangeKind::Results] {
            for exchange in plan.layout().world().ranks().map(|rank| plan.exchange(kind, rank)) {
                for piece in exchange.sends.iter().chain(&exchange.receives).flat_map(|parcel| &parcel.pieces) {
                    let first = matrix_at(plan.params(), piece.param, piece.span.start);
                    prop_assert_eq!(first, matrix_at(plan.params(), piece.param, piece.span.end - 1));
                }
            }
        }
    }

    #[test]
    fn exchanges_that_do_not_apply_are_empty(plan in strategies::plan()) {
        for kind in [ExchangeKind::Gradients, ExchangeKind::Updates, ExchangeKind::Results] {
            let applies = match kind {
                ExchangeKind::Gradients => plan.policy() == Policy::CopyToOwners && plan.route() == Route::ReduceScatter,
                ExchangeKind::Updates => plan.policy() != Policy::CopyToOwners,
                ExchangeKind::Results => plan.policy() == Policy::AssignOwner,
            };
            prop_assert_eq!(plan.exchange_kinds().contains(&kind), applies);
        }
        prop_assert!(plan.exchange_kinds().is_sorted());
    }
}
