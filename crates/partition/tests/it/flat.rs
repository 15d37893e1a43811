//! `Flat` is DeepSpeed's map: the recorded ones, and some worked out by hand from its formulas.

use std::num::NonZeroUsize;

use polarshard_partition::{
    Layout, Matrix, Param, Params, Placement, Rank, Span, UpdateGroup, Wire, WorldSize,
};

fn muon(name: &str, shape: &[usize]) -> Param {
    let (rows, cols) = (shape[0], shape[1..].iter().product());
    let matrix = Matrix {
        span: Span::new(0, rows * cols),
        rows,
        cols,
        cost: 1,
    };
    Param {
        matrices: vec![matrix],
        ..adamw(name, shape)
    }
}

fn adamw(name: &str, shape: &[usize]) -> Param {
    Param {
        name: name.into(),
        shape: shape.into(),
        wire: Wire::F32,
        matrices: vec![],
    }
}

fn flat(params: &[Param], world: usize) -> (Params, Layout) {
    let params = Params::new(params.to_vec()).unwrap();
    let layout = Layout::new(
        &params,
        WorldSize::new(world).unwrap(),
        Placement::Flat,
        NonZeroUsize::MAX,
    )
    .unwrap();
    (params, layout)
}

/// (rank, elements) of every slice.
fn map(params: &[Param], world: usize) -> (Vec<Vec<(usize, usize)>>, usize) {
    let (params, layout) = flat(params, world);
    let slices = params.iter().map(|(id, _)| {
        layout
            .slices(id)
            .iter()
            .map(|slice| (slice.rank.0, slice.span.len()))
            .collect()
    });
    (slices.collect(), layout.blocks()[0].shard_len)
}

/// The model of the recorded runs, as its modules would register it.
fn recorded_model() -> Vec<Param> {
    vec![
        adamw("embed.weight", &[40, 24]),
        muon("blocks.0.attn.weight", &[72, 24]),
        adamw("blocks.0.attn.bias", &[72]),
        muon("blocks.0.proj.weight", &[24, 24]),
        adamw("blocks.0.norm.weight", &[24]),
        muon("blocks.0.up.weight", &[96, 24]),
        muon("blocks.0.down.weight", &[24, 96]),
        muon("blocks.1.tiny.weight", &[5, 3]),
        muon("blocks.1.up.weight", &[64, 40]),
        muon("blocks.1.down.weight", &[40, 64]),
        muon("conv.weight", &[16, 3, 3, 3]),
        adamw("lm_head.weight", &[40, 24]),
    ]
}

const MUON: [&str; 8] = [
    "blocks.0.up.weight",
    "blocks.0.attn.weight",
    "blocks.1.up.weight",
    "blocks.1.down.weight",
    "blocks.0.down.weight",
    "blocks.0.proj.weight",
    "conv.weight",
    "blocks.1.tiny.weight",
];
const ADAMW: [&str; 4] = [
    "embed.weight",
    "blocks.0.attn.bias",
    "blocks.0.norm.weight",
    "lm_head.weight",
];

/// Recorded from DeepSpeed 0.19 at edaa7221: its `param_to_partition_ids`, in flat order, and its
/// `partition_size`.
#[test]
fn recorded_maps_come_out() {
    let two: [&[&[usize]]; 2] = [
        &[&[0], &[0], &[0, 1], &[1], &[1], &[1], &[1], &[1]],
        &[&[0], &[0, 1], &[1], &[1]],
    ];
    let four: [&[&[usize]]; 2] = [
        &[&[0], &[0, 1], &[1, 2], &[2], &[2, 3], &[3], &[3], &[3]],
        &[&[0, 1], &[1, 2], &[2], &[2, 3]],
    ];
    for (world, partition_ids, partition_size) in [(2, two, [6240, 1008]), (4, four, [3120, 504])] {
        let (params, layout) = flat(&recorded_model(), world);
        assert_eq!(
            layout
                .spaces()
                .iter()
                .map(|space| space.group)
                .collect::<Vec<_>>(),
            [UpdateGroup::Muon, UpdateGroup::AdamW]
        );
        for (group, order) in [&MUON[..], &ADAMW].into_iter().enumerate() {
            let block = &layout.blocks()[group];
            assert_eq!(block.shard_len, partition_size[group]);
            let names: Vec<_> = block
                .runs
                .iter()
                .filter_map(|run| Some(params.get(run.source?.param).name.as_str()))
                .collect();
            assert_eq!(names, order);
            for (name, ids) in order.iter().zip(partition_ids[group]) {
                let owners = layout.owners(params.id(name).unwrap());
                assert_eq!(
                    owners.iter().map(|rank| rank.0).collect::<Vec<_>>(),
                    *ids,
                    "{name} of {world}"
                );
            }
        }
    }
}

#[test]
fn three_squares_on_two_ranks() {
    let squares = ["a", "b", "c"].map(|name| muon(name, &[256, 256]));
    let slices = vec![
        vec![(0, 65536)],
        vec![(0, 32768), (1, 32768)],
        vec![(1, 65536)],
    ];
    assert_eq!(map(&squares, 2), (slices, 98304));
    let biases = ["a", "b", "c"].map(|name| adamw(name, &[256]));
    assert_eq!(
        map(&biases, 2),
        (
            vec![vec![(0, 256)], vec![(0, 128), (1, 128)], vec![(1, 256)]],
            384
        )
    );
}

#[test]
fn five_squares_on_two_ranks() {
    let squares = ["a", "b", "c", "d", "e"].map(|name| muon(name, &[128, 128]));
    let (slices, shard_len) = map(&squares, 2);
    assert_eq!(
        (slices[2].clone(), shard_len),
        (vec![(0, 8192), (1, 8192)], 40960)
    );
}

#[test]
fn one_matrix_on_four_ranks() {
    assert_eq!(
        map(&[muon("a", &[5, 3])], 4),
        (vec![vec![(0, 4), (1, 4), (2, 4), (3, 3)]], 4)
    );
}

#[test]
fn more_ranks_than_elements() {
    let (params, layout) = flat(&[adamw("a", &[3])], 4);
    assert_eq!(layout.padding(), 5);
    let lens: Vec<_> = (0..4)
        .map(|rank| {
            layout
                .rank_slices(Rank(rank))
                .map(|slice| slice.span.len())
                .sum::<usize>()
        })
        .collect();
    assert_eq!(lens, [2, 1, 0, 0]);
    assert_eq!(
        layout
            .owners(params.id("a").unwrap())
            .iter()
            .collect::<Vec<_>>(),
        [Rank(0), Rank(1)]
    );
}

#[test]
fn a_rank_with_parts_of_two_matrices() {
    let matrices = [muon("a", &[7, 5]), muon("b", &[5, 3]), muon("c", &[3, 3])];
    assert_eq!(
        map(&matrices, 3),
        (
            vec![vec![(0, 20), (1, 15)], vec![(1, 5), (2, 10)], vec![(2, 9)]],
            20
        )
    );
}

#[test]
fn shapes_descend_as_tuples_and_ties_keep_registration_order() {
    let shapes: [(&str, &[usize]); 6] = [
        ("a", &[4, 9]),
        ("b", &[4, 10]),
        ("c", &[4, 9]),
        ("d", &[10, 2]),
        ("e", &[4, 9, 1]),
        ("f", &[10, 2]),
    ];
    let (params, layout) = flat(&shapes.map(|(name, shape)| muon(name, shape)), 2);
    let names: String = layout.blocks()[0]
        .runs
        .iter()
        .filter_map(|run| Some(params.get(run.source?.param).name.as_str()))
        .collect();
    assert_eq!(names, "dfbeac");
}
